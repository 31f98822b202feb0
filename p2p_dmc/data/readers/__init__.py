"""One reader per format. Each turns files into samples: keys, and fields that are ranges of files."""
