"""What benchmarks/loader.py is made of: the script in which three loaders take turns."""
