"""A model's files and shapes: Hugging Face directories, GGUF, models made from scratch, the weight table, memory and FLOPs."""
