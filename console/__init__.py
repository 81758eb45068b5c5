"""The operator console. Screens (`console.screens`) turn a snapshot into lines of text. `console.app` shows
these lines in a terminal, using Textual; `console.top` prints them once, without Textual."""
