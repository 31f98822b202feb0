"""What benchmarks/fetch.py is made of: peers that hold and fetch shards, and plain copies to compare with."""
