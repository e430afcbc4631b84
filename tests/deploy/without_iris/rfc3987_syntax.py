"""In place of the package, which takes a second to build its grammar of IRIs in each Ray process.

Ray imports jsonschema, which does without the package where it is not installed.
"""

raise ImportError("Ray checks no IRIs")
