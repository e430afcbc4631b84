"""The web page of explanations, which needs nothing but the serving process."""
