"""What benchmarks/joining.py is made of: peers on hosts of their own, and the script that they train with."""
