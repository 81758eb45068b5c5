"""The admin API, with which operators view and control the service over `admin.sock`."""
