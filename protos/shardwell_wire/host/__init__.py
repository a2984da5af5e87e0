"""What the processes of one host share: files in shared memory, folders of servers."""
