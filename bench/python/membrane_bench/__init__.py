"""What membrane's benchmarks run inside of an engine: a baseline connector and a model maker."""
