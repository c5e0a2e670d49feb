"""GGUF files of the Llama family as checkpoints in Hugging Face layout, made once and kept in a cache directory.

checkpoint.py  the story: file -> directory, once, whoever asks first
metadata.py    keys of the file -> config.json, generation_config.json
vocabulary.py  keys of the file -> tokenizer.json, tokenizer_config.json
tensors.py     blocks of the file -> model.safetensors

Reading needs the package `gguf`. None of it loads torch.
"""
