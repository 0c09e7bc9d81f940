"""Sets of images: in memory, in folders, in parquet files, of Hugging Face."""
