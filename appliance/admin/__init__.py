"""The admin API, which lets operators view and control the service over `admin.sock`."""
