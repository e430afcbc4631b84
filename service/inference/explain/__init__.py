"""Why a score is what it is: its exact terms, and what it is without a part of a text."""
