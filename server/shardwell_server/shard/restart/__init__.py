"""What a new process of a server takes up from shared memory."""
