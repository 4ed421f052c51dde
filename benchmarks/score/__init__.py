"""What README.md and docs/performance.md show, measured by ``python -m dfgnn.bench --cases score.cases``.

``data`` makes graphs; ``models``, ``batches`` and ``dense`` make contestants; ``cases`` lists what is
compared, the most important first; ``pages`` fills the tables of the documents from the file of results and
``charts`` draws the pictures. ``json_files`` writes the files of other programs.
"""
