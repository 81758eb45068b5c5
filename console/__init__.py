"""The operator console. Screens are plain functions from a snapshot to lines of text (`console.screens`);
`console.app` shows the lines in a terminal with Textual, and `console.top` prints them once, without
Textual."""
