"""Speed of the project beside that of other libraries (peers), measured in turn on equal work."""
