"""Jobs over networks of their own, which are made and removed here. They need root."""
