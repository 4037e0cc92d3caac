"""What measures, shows and fits: evaluation of recipes, the papers' figures, calibration, reports, the command line."""
