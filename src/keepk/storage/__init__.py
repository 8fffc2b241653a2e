"""Files that are complete or absent: safetensors and JSON, written atomically and verified when read."""
