"""An object with a state of its own, for tests of checkpoints."""


class Stateful:
    """Keeps what it is given, as programs' own objects do."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state
