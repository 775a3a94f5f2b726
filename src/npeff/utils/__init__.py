"""What every room uses: configs, errors, files, figures and tables."""
