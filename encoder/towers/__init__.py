"""The vision tower, the audio tokenizer encoder and the audio encoder, with their weights."""
