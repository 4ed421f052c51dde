"""The colour of each library in all pictures: legible on white and black, distinct for the colour-blind."""

COLOURS = {"dfgnn": "#d9480f", "PyG": "#3f7fbf", "DGL": "#2a9d8f", "turbo-gnn": "#8e6bb0"}

#: Text and axes of a picture for a dark page.
ON_DARK = {
    "figure.facecolor": "#131416",
    "axes.facecolor": "#131416",
    **dict.fromkeys(
        ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), "#cfd0d0"
    ),
}


def colour_of(name: str, otherwise: str) -> str:
    """The colour of the library of this name, in any case; ``otherwise`` of a variant or of anything else."""
    return next((colour for library, colour in COLOURS.items() if library.lower() == name.lower()), otherwise)
