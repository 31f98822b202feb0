"""What benchmarks/recovery.py is made of: the trials, and each contestant's peers."""
