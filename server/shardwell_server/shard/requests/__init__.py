"""What a server does for each request, whichever way it comes."""
