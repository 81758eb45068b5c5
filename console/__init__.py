"""The operator console. Screens are plain functions that turn a snapshot into lines of text
(`console.screens`). `console.app` shows the lines in a terminal with Textual, and `console.top` prints them
once, without Textual."""
