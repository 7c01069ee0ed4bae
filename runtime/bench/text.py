"""The text whose perplexity stands beside every speed. Written for this purpose; it is nobody's training data."""

TEXT = """\
The old kiln stood at the end of the yard, behind the sheds where the planks were stacked. Every autumn the foreman \
walked around it with a lamp and looked for cracks between the bricks. A crack no wider than a thumbnail lets the heat \
out, he used to say, and then the wood on that side dries slower than the rest, and you find out in spring, when the \
floor you laid for somebody begins to creak.

Drying wood is mostly a matter of patience. A fresh plank holds more water than anyone expects, some of it free in the \
hollow cells and some of it bound in their walls. The free water leaves first and does no harm. When the walls begin \
to give up theirs, the plank shrinks, and it shrinks more across the rings than along them, so that a board cut from \
the edge of a log will cup while one cut through the heart stays almost flat. If the air is too dry and too hot, the \
outside hardens before the inside has had time to follow, and the board tears itself open from within. Nobody sees it \
until the saw goes through.

So the fire was kept low for the first days, and a pan of water was left beside it. On the third evening the boy who \
minded the kiln opened a small door, took out a sample and weighed it. He wrote the weight on a slate next to the \
weight of the day before. As long as the difference was large, nothing was changed. When it became small, he was \
allowed to add a little wood to the fire, but not much, and he had to say so in the morning.

The foreman trusted the slate more than he trusted his own hands. A man who touches a board feels whether it is warm, \
and he believes that he feels whether it is dry, which is something else entirely. Two of his uncles had been sure of \
their hands. One of them lost a whole stack of oak in a single week and never spoke of it afterwards. The other was \
lucky all his life, and nobody learned anything from him.

There was a second rule, about what left the yard. Each stack carried a label with the day it went in, the day it came \
out and the last weight on the slate, and a stack without a label was firewood, however good it looked. Buyers found \
this strange at first. They came with a list of lengths and wanted to be gone before noon, and here was a man who \
would rather burn a stack than sell it without its paper. But the joiners in the town understood it well. They had \
stopped measuring every board that came from him, because in eleven years the labels had not been wrong, and a morning \
that is not spent on measuring is a morning in which a table gets made.
"""
