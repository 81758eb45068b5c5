"""The admin API, which operators use to view and control the service over `admin.sock`."""
