"""What is true: pure cores, without socket, clock, thread, torch or global random number (DESIGN section 3)."""
