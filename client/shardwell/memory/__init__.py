"""Memory of a process: the C library's allocator, reusable buffers, copies to and from a GPU."""
