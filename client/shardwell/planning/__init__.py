"""What a run will take, worked out before there is one."""
