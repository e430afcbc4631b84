"""A loaded model runs rows, and the results become vectors, scores, tags and chunk embeddings."""
