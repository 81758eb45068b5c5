"""Functions of the operating system in a form that several processes of the service use."""
