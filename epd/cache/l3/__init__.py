"""Level 3 of the KV cache: a store of pages that outlives the process, on this host or others. Bytes, never tensors."""
