"""The screens. Each module contains one screen."""
