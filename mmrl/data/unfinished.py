"""Names that an engine that cuts answers, and the sampler that asks for their rest, agree on."""

UNFINISHED = "unfinished"  # tag of answers that go on in the next step; an engine sets it
BEGUN = "begun_answer"  # column of a prompt with what was noted of its answer so far
NOTED = ("token",)  # the notes in it
