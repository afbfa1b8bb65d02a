"""What only a Gaudi card can tell: docs/gaudi.md lists the same questions, and `make test-hpu` answers each, by number.

Needs nothing but Python: the report is written where packages are missing, too.
"""

QUESTIONS: dict[int, str] = {
    1: "Is nothing compiled after warm-up, in lazy mode and without it?",
    2: "Which ops run on the host?",
    3: "What does the graph of a shape take of the memory?",
    4: "Where does a lack of memory surface, and does the card go on after it?",
    5: "Do the memory figures follow what is allocated?",
    6: "How far is the fused attention's softmax, its fast one, and that in FP8, from float32?",
    7: "What do casts to FP8 round to, and what becomes of numbers beyond the range?",
    8: "How exact are sums of products in bfloat16?",
    9: "Does index_reduce_ give the CPU's numbers?",
    10: "Do two cards add up, the same each time?",
    11: "Can a process use the card right after another one has ended?",
    12: "Is hl-smi's answer in the form that is read?",
    13: "Do the image's torch and NumPy belong together?",
    14: "Are tokens those of the CPU in every setting, so that no tensor is on the wrong side?",
    15: "Does the compile backend keep what layers write into the cache?",
    16: "Is Intel's Neural Compressor there?",
    17: "How long does a start take, and how fast are tokens?",
    18: "Does a model over two cards, in graphs, give one card's tokens?",
}
# Answered by tests and ranks of the report; each other one has a program in hpu_probes.py.
FROM_SUITE = (1, 10, 14, 15, 18)
