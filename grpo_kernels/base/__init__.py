"""What every part may use: checks of arguments, collectives, ranks that have to agree. It knows no loss and no head."""
