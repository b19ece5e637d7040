"""What records mean: how each becomes a document, of which some tokens count in the loss."""
