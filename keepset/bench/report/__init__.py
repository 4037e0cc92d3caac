"""What people read: the HTML report of a comparison."""
