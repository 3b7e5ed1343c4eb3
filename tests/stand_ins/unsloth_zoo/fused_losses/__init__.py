raise ImportError("expected nobody to run the package's __init__")
