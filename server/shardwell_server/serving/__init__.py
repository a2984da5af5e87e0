"""What both servers share: rpcs, access, limits, the life of the process."""
