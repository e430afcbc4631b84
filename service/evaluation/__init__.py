"""Quality of search with a model, by relevance judgements; the command `vitrine eval`.

The files in the order of an evaluation: `collection` reads documents, queries and judgements,
`ranking` finds the best documents of each query, `measures` compares them with the judgements, and
`evaluation` connects these with the jobs of bulk encoding, which compute vectors and scores.
`comparison` compares two evaluations, `report` shows the result, and `gate` decides by it about a
new version. `migration` chooses one of the `maps` from a new model's vectors to an old model's.
"""
