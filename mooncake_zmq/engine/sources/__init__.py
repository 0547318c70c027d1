"""Sources of weights: a GGUF file, a Hugging Face directory, or random numbers of a shape. They read and never write."""
