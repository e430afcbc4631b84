"""Texts and pairs of texts become rows of token ids; long texts are divided into chunks."""
