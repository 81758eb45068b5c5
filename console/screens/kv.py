"""KV cache: a map of all of a replica's blocks. The screen names the request and tenant that use the block
under the cursor."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from string import ascii_letters

from appliance.snapshot import BLOCK_STATES, BlockMap, KvCache, UnfinishedRequest
from console import units
from console.context import Context
from console.glyphs import bar_legend, meter
from console.lines import BLANK, Line, Span, clip, fit, heading, line, span, width_of
from console.roles import SERIES, Role
from console.screens.base import FAR, JUMP_LETTERS, PAGE, Fact, Table, View, table
from console.screens.panels import history_chart, kv_bar, shown_span

_CONTEXT_ROWS = 7
_CELL_SIZE_WIDTH = 24
"""Width of the text that states how many blocks a cell represents."""
_LETTERS = {"braille": "·▓█▒", "block": "·▓█▒", "ascii": ".=#S"}
"""Characters for free, cached, used and shared blocks. The bar above the map uses the same characters for
used and cached blocks."""
_STATE_ROLES: tuple[Role, ...] = ("free", "cached", "used", "shared")
_SHARING_ROLES: tuple[Role, ...] = ("free", "cached", "track", "shared")
"""Roles that highlight only blocks that several sequences share or could share."""
_AGE_ROLES: tuple[Role, ...] = ("used", "used", "s1", "s1", "s5", "s5", "cached", "cached")


class KvView(View):
    """The screen that shows the map of KV blocks."""

    name = "kv"
    key = "3"
    title = "KV cache"
    short = "KV"
    can_zoom = True
    help_text = (
        "Every block of a replica's KV cache, in pool order. If there are more blocks than cells, each cell "
        "represents several blocks and shows the first of them, so the map shows roughly the right share of "
        "each state. The line below the map states the number of blocks per cell. The arrow keys move the "
        "cursor, and {open} shows the request that uses the block under it. {zoom} shows only the map. "
        "Individual blocks are read once per second, so the map can be older than the totals above it. Page "
        "down shows the next replica, and {variant} switches between colouring by state, tenant, age and "
        "sharing."
    )
    reads_blocks = True
    variants = ("state", "tenant", "age", "sharing", "replicas")
    explanations = (
        *("kv_used", "block_state", "hit_rate", "evictions", "preemptions", "kv_tokens", "kv_size"),
        *("block_age", "blocks"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.cursor = 0
        self.replica = 0
        self._columns = 1
        self._cells = 1
        self._jump_cells: list[int] = []
        """The cells that jump mode can select, ordered by letter."""

    @property
    def hints(self) -> tuple[tuple[str, str], ...]:
        """Commands shown in the footer."""
        if self.variant == "replicas":
            return ()
        zoom = ("zoom", "all panels" if self.zoomed else "zoom")
        return (("open", "request"), ("move page-down", "next replica"), zoom)

    def render(self, context: Context, width: int, height: int) -> list[Line]:
        caches = context.snapshot.kv if context.snapshot else []
        self.can_jump, self._jump_cells = False, []
        if not caches:
            return [heading("KV cache", width), [span("no replica has reported its KV cache", "dim")]]
        if self.variant == "replicas":
            return _summary(context, caches, width)[:height]
        self.replica %= len(caches)
        one = caches[self.replica]
        lines = [heading(f"{one.replica}", width, f"replica {self.replica + 1} of {len(caches)}")]
        lines += _totals(context, one, width)
        if one.blocks is None:
            reason = "Blocks unknown: not reported by the replica, or not recorded."
            lines += [[span(reason, "dim")], BLANK]
            space = height - len(lines)
            rows = max(2, space - 1 if self.zoomed else min(12, space // 2 - 2))
            lines.append(heading("Blocks in use", width, f"all replicas, last {shown_span(context, width)}"))
            lines += history_chart(context, lambda point: point.kv, width, rows, "used")
            if not self.zoomed:
                lines += [BLANK, *_largest(context, one, width, height - len(lines) - 1)]
            return lines[:height]
        contexts = _CONTEXT_ROWS if height >= 30 and not self.zoomed else 0
        tenants = self._tenant_lines(context, one.blocks, width, 3 if contexts else 2)
        space = max(3, height - len(lines) - 1 - len(tenants) - (contexts + 1 if contexts else 0))
        if len(one.blocks.states) > width * space or one.blocks.stride > 1:
            space = max(2, space - 1)  # The legend takes up one more line.
        lines += [*self._map(context, one.blocks, width, space)]
        lines += self._legend(context, one.blocks, width, tenants)
        lines.append(self._under_cursor(context, one.blocks, width))
        if not self.zoomed and height - len(lines) >= 4:
            largest = _largest(context, one, width, height - len(lines) - 1)
            self.can_jump = True
            if context.jumping:
                self._label(_by_length(context, one), one.blocks, largest)
            lines += [BLANK, *largest]
        return lines[:height]

    def _label(self, requests: list[UnfinishedRequest], blocks: BlockMap, largest: list[Line]) -> None:
        """Label each of the longest contexts with the letter that moves the cursor to its first cell."""
        cells = self._first_cells(blocks)
        for at, request in enumerate(requests[: len(largest) - 1], 1):
            if request.request_id in cells and len(self._jump_cells) < len(JUMP_LETTERS):
                first, *others = largest[at]
                letter = Span(JUMP_LETTERS[len(self._jump_cells)], "tab")
                largest[at] = [letter, first._replace(text=first.text[1:]), *others]
                self._jump_cells.append(cells[request.request_id])

    def _first_cells(self, blocks: BlockMap) -> dict[str, int]:
        """For each request, return the first cell from which it can be opened."""
        found: dict[str, int] = {}
        owners, size = _owners(blocks), self._blocks_per_cell(blocks)
        for cell in range(self._cells):
            if request := _first_request(blocks, owners[cell * size : (cell + 1) * size]):
                found.setdefault(request, cell)
        return found

    def facts(self, context: Context) -> list[Fact]:
        facts: list[Fact] = []
        for one in context.snapshot.kv if context.snapshot else []:
            used = units.ratio(one.blocks_used, one.blocks_total)
            cached, hit = units.count(one.blocks_cached), units.percent(one.hit_rate)
            text = f"{units.percent(used)} used, {cached} cached, hit {hit}"
            facts.append((one.replica, text, "text"))
        return facts or [("KV cache", "no replica has reported", "dim")]

    def export(self, context: Context) -> Table:
        caches = context.snapshot.kv if context.snapshot else []
        if self.variant == "replicas" or not caches:
            return table(
                caches,
                *("replica", "blocks_total", "blocks_used", "blocks_cached", "block_tokens", "kv_bytes"),
                *("hit_rate", "evictions", "preemptions"),
            )
        return table(
            _by_length(context, caches[self.replica % len(caches)]),
            *("request_id", "tenant", "replica", "prompt_tokens", "generated_tokens", "blocks"),
        )

    def move(self, rows: int) -> None:
        if abs(rows) in (PAGE, FAR):
            self.replica, self.cursor = self.replica + (1 if rows > 0 else -1), 0
            return
        self.cursor = max(0, min(self._cells - 1, self.cursor + rows * self._columns))

    def sideways(self, columns: int) -> None:
        self.cursor = max(0, min(self._cells - 1, self.cursor + columns))

    def request(self, context: Context) -> str:
        caches = context.snapshot.kv if context.snapshot else []
        blocks = caches[self.replica % len(caches)].blocks if caches else None
        if blocks is None or self.variant == "replicas":
            return ""
        return _first_request(blocks, _owners(blocks)[slice(*self._block_range(blocks))])

    def zoom(self) -> bool:
        return self.variant != "replicas" and super().zoom()

    def jump(self, number: int) -> bool:
        if number >= len(self._jump_cells):
            return False
        self.cursor = self._jump_cells[number]
        return True

    def _blocks_per_cell(self, blocks: BlockMap) -> int:
        return max(1, -(-len(blocks.states) // max(1, self._cells)))

    def _block_range(self, blocks: BlockMap) -> tuple[int, int]:
        """Return the range of blocks under the cursor, as the first block and the one after the last."""
        per_cell = self._blocks_per_cell(blocks)
        first = min(self.cursor * per_cell, len(blocks.states) - 1)
        return first, min(first + per_cell, len(blocks.states))

    def _map(self, context: Context, blocks: BlockMap, width: int, height: int) -> list[Line]:
        total = len(blocks.states)
        self._columns = width
        per_cell = max(1, -(-total // (width * height)))
        self._cells = -(-total // per_cell)
        self.cursor = min(self.cursor, self._cells - 1)
        letters, roles = self._cell_styles(context, blocks, per_cell)
        lines = []
        for start in range(0, self._cells, width):
            row: Line = []
            end = min(start + width, self._cells)
            at = start
            while at < end:
                stop = at + 1
                while stop < end and roles[stop] == roles[at]:
                    stop += 1
                row.append(Span("".join(letters[at:stop]), roles[at]))
                at = stop
            if start <= self.cursor < end:
                row = _with_cursor(row, self.cursor - start)
            lines.append(row)
        return lines

    def _cell_styles(self, context: Context, blocks: BlockMap, per_cell: int) -> tuple[list[str], list[Role]]:
        """Return each cell's letter and role. A cell shows its first block, so each state's share of the map
        is close to its share of the pool."""
        states = blocks.states
        marks = _LETTERS[context.glyphs]
        letters: list[str] = []
        roles: list[Role] = []
        owners = _owners(blocks) if self.variant == "tenant" else array("H")
        tenant_roles = [_tenant_role(name) for name in blocks.tenants]
        known = _known_letters(context, blocks)
        tenant_letters = [known[name] for name in blocks.tenants]
        for start in range(0, len(states), per_cell):
            state = states[start]
            letter, role = marks[state], _STATE_ROLES[state]
            if self.variant == "tenant" and state >= 2:
                if (owner := owners[start]) < len(tenant_roles):
                    letter, role = tenant_letters[owner], tenant_roles[owner]
            elif self.variant == "sharing":
                role = _SHARING_ROLES[state]
            elif self.variant == "age" and state and blocks.ages is not None:
                age = blocks.ages[start]
                letter, role = str(min(9, age)), _AGE_ROLES[min(age, len(_AGE_ROLES) - 1)]
            letters.append(letter)
            roles.append(role)
        return letters, roles

    def _tenant_lines(self, context: Context, blocks: BlockMap, width: int, rows: int) -> list[Line]:
        """Return the tenants' letters and names in up to `rows` lines. The first line leaves space for the
        cell size. If the map does not show tenants, return one empty line."""
        lines: list[Line] = [[]]
        if self.variant != "tenant":
            return lines
        letters = _known_letters(context, blocks)
        names = sorted(set(blocks.tenants))
        left = width - _CELL_SIZE_WIDTH
        for number, name in enumerate(names):
            entry = [span(f"{letters[name]} ", _tenant_role(name)), span(f"{name or 'unknown'}  ", "dim")]
            more = f"and {len(names) - number} more"
            reserved = len(more) if len(lines) == rows and number + 1 < len(names) else 0
            if width_of(entry) + reserved > left:
                if len(lines) == rows:
                    lines[-1].append(span(more, "dim"))
                    break
                lines.append([])
                left = width
            lines[-1] += entry
            left -= width_of(entry)
        return lines

    def _legend(self, context: Context, blocks: BlockMap, width: int, tenants: list[Line]) -> list[Line]:
        """Return the map's legend: the number of blocks per cell, what a cell with several blocks shows, and
        what the characters mean."""
        per_cell = self._blocks_per_cell(blocks) * blocks.stride
        if per_cell == 1:
            size, mixed = "1 cell = 1 block", []
        else:
            text = f"1 cell = {per_cell} blocks; a mixed cell shows its first block"
            size, mixed = "", [clip([span(text, "dim")], width)]
        return [*mixed, *self._meanings(context, blocks, width, tenants, size)]

    def _meanings(
        self, context: Context, blocks: BlockMap, width: int, tenants: list[Line], size: str
    ) -> list[Line]:
        """Return legend lines that explain the map's characters. The first line starts with the text
        `size`."""
        marks = _LETTERS[context.glyphs]
        row: Line = [span(f"{size}  ", "dim")] if size else []
        if self.variant == "tenant":
            first = [span(f"{size:<{_CELL_SIZE_WIDTH}}" if size else "", "dim"), *tenants[0]]
            return [clip(one, width) for one in (first, *tenants[1:])]
        if self.variant == "age":
            row.append(span("0: in use or <1 s, 3: 7 s, 6: 1 min, 9: ≥8 min since use", "dim"))
            return [clip(row, width)]
        roles = _SHARING_ROLES if self.variant == "sharing" else _STATE_ROLES
        for number, name in enumerate(BLOCK_STATES):
            count = blocks.states.count(number) * blocks.stride
            # Above the map, the number of used blocks includes shared blocks.
            row.append(span("+ " if name == "shared" else "", "dim"))
            row += [
                span(f"{marks[number]} ", roles[number]),
                span(name, "label"),
                span(f" {count:,}  ", "dim"),
            ]
        return [clip(row, width)]

    def _under_cursor(self, context: Context, blocks: BlockMap, width: int) -> Line:
        first, end = self._block_range(blocks)
        last = end - 1
        first_block, last_block = first * blocks.stride, end * blocks.stride - 1
        where = f"blocks {first_block:,} to {last_block:,}"
        if first_block == last_block:
            where = f"block {first_block:,}"
        states = ", ".join(BLOCK_STATES[state] for state in dict.fromkeys(blocks.states[first:end]))
        row = line(span("▸ ", "accent"), span(where, "bold"), span(f"  {states}", "dim"))
        owners = {one for one in _owners(blocks)[first : last + 1] if one < len(blocks.requests)}
        for owner in sorted(owners)[:3]:
            row += [span(f"  {blocks.requests[owner]} ", "text"), span(blocks.tenants[owner], "bold")]
        if len(owners) > 3:
            row.append(span(f"  and {len(owners) - 3} more", "dim"))
        if not owners:
            row.append(span("  not in use by a request", "dim"))
        return clip(row, width)


def _owners(blocks: BlockMap) -> array[int]:
    owners = array("H")
    owners.frombytes(blocks.owners)
    return owners


def _first_request(blocks: BlockMap, owners: Iterable[int]) -> str:
    """Return the id of the first request that uses one of these blocks, or an empty string if none does."""
    return next((blocks.requests[one] for one in owners if one < len(blocks.requests)), "")


def _tenant_role(name: str) -> Role:
    return SERIES[zlib.crc32(name.encode()) % len(SERIES)]


def tenant_letters(names: Iterable[str]) -> dict[str, str]:
    """Assign each tenant a letter: the first one in its name that is not yet taken or, if all of them are
    taken, the first free letter of the alphabet. Unknown tenants, and tenants beyond the 52nd, get "?"."""
    letters: dict[str, str] = {}
    free = dict.fromkeys(ascii_letters)
    for name in sorted(set(names) - {""}):
        letters[name] = next((one for one in (*name.lower(), *free) if one in free), "?")
        free.pop(letters[name], None)
    return {**letters, "": "?"}


def _known_letters(context: Context, blocks: BlockMap) -> dict[str, str]:
    """Return the letters of all the service's tenants, so that a tenant has the same letter on every
    replica."""
    known = context.snapshot.tenants if context.snapshot else []
    return tenant_letters([*(one.name for one in known), *blocks.tenants])


def _with_cursor(row: Line, column: int) -> Line:
    result: Line = []
    for one in row:
        size = len(one.text)
        if 0 <= column < size:
            result += [Span(one.text[:column], one.role), Span(one.text[column], "tab")]
            result.append(Span(one.text[column + 1 :], one.role))
        else:
            result.append(one)
        column -= size
    return [one for one in result if one.text]


def _totals(context: Context, one: KvCache, width: int) -> list[Line]:
    free = one.blocks_total - one.blocks_used - one.blocks_cached
    used = units.ratio(one.blocks_used, one.blocks_total)
    tokens = one.blocks_used * one.block_tokens
    facts = (
        ("used", f"{one.blocks_used:,} ({units.percent(used)})"),
        ("cached", f"{one.blocks_cached:,}"),
        ("free", f"{free:,}"),
        ("hit", units.percent(one.hit_rate)),
        ("evictions", units.count(one.evictions)),
        ("preemptions", units.count(one.preemptions)),
        ("tokens", f"{units.short(tokens)} of {units.short(one.blocks_total * one.block_tokens)}"),
        ("size", units.size(one.kv_bytes)),
    )
    row: Line = []
    for name, value in facts:
        part = [span(f"{'  ' if row else ''}{name} ", "label"), span(value, "bold")]
        if width_of(row) + width_of(part) <= width:
            row += part
    return [kv_bar(context, one, width), row]


def _length(row: UnfinishedRequest) -> int:
    return row.prompt_tokens + (row.generated_tokens or 0)


def _by_length(context: Context, one: KvCache) -> list[UnfinishedRequest]:
    """Return a replica's requests, longest context first."""
    requests = context.snapshot.requests if context.snapshot else []
    return sorted((row for row in requests if row.replica == one.replica), key=lambda row: -_length(row))


def _largest(context: Context, one: KvCache, width: int, height: int) -> list[Line]:
    """Return the longest contexts on a replica, as lines."""
    requests = _by_length(context, one)
    lines = [heading("Longest contexts", width, "tokens so far, share of used tokens")]
    for row in requests[: max(0, height - 1)]:
        length = _length(row)
        names = 38 if width >= 100 else 22
        size = max(0, width - 42 - names)
        share = length / max(1, one.block_tokens * one.blocks_used)
        lines.append(
            clip(
                [
                    span(f"{fit(row.request_id, names)} "),
                    span(f"{fit(row.tenant, 16)} ", "bold"),
                    span(f"{length:>9,} "),
                    *meter(min(1.0, share), size, context.glyphs, "used"),
                    span(f"{units.count(row.blocks):>6}", "dim"),
                    span(" blocks", "label"),
                ],
                width,
            )
        )
    if not requests:
        lines.append([span("no requests are running on this replica", "dim")])
    return lines


def _summary(context: Context, caches: list[KvCache], width: int) -> list[Line]:
    parts = bar_legend(("used", "cached"), context.glyphs)
    lines = [heading("All replicas", width, f"{parts}, free")]
    for one in caches:
        lines += [BLANK, [span(one.replica, "bold"), span(f"  {one.kv_cache_dtype}", "dim")]]
        lines += _totals(context, one, width)
    return lines
