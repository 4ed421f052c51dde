"""What ``benchmarks/scoreboard.py`` measures and shows.

``turns`` times contestants in turns; ``data`` makes graphs; ``attention``, ``models`` and ``batches`` make
contestants; ``cases`` lists what is compared, the most important first; ``records`` keeps the one file;
``pages`` fills the tables of the documents from it and ``charts`` draws the pictures.
"""
