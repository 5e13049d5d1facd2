"""Runs in words, tables, charts, maps and films, without ComfyUI: used by the nodes, by ``api`` and by batches.

From Python, these are ``specar.acceptance_map``, ``timeline_frames``, ``comparison_chart``, ``comparison_table`` and
``run_report`` (see ``api.py``).
"""
