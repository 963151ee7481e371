"""Questions for word vectors of the demo corpus: analogies and pairs that documentation of Python programs knows.

Small, ours, and about the words that are frequent there; for text of another kind there are the published files
(`--analogies`, `--similarity`). Pairs have three degrees: 2 for words of one kind that can stand for each other in a
sentence, 1 for words of one subject, 0 for words that have little to do with each other.
"""

from __future__ import annotations

from itertools import permutations

from manyhands.workloads.glove.analogies import Section
from manyhands.workloads.glove.similarity import Pair

__all__ = ["demo_pairs", "demo_questions"]

_PLURALS = (
    "argument arguments,file files,value values,function functions,method methods,object objects,element elements,"
    "parameter parameters,tensor tensors,array arrays,dimension dimensions,error errors,exception exceptions,"
    "module modules,string strings,type types,name names,option options,line lines,item items,class classes,key keys"
)
_VERBS = (
    "return returns,raise raises,contain contains,use uses,call calls,create creates,specify specifies,"
    "support supports,represent represents,require requires,take takes,make makes,convert converts,compute computes"
)
_OPPOSITES = (
    "minimum maximum,min max,first last,lower upper,start stop,left right,read write,row column,input output,"
    "open close,before after,true false,positive negative,encode decode,forward backward,first second"
)
_SAME_KIND = (
    "array tensor,minimum maximum,rows columns,list tuple,integer float,function method,width height,read write,"
    "true false,input output,parameter argument,string bytes,index key,module package,row column,first last"
)
_SAME_SUBJECT = (
    "file path,loop iteration,matrix vector,thread lock,error exception,class instance,byte encoding,network socket,"
    "process pipe,sort order,log message,default option,shape dimension,gradient backward,date time,test assert"
)
_APART = (
    "matrix password,socket gradient,month tensor,lock comma,email sine,thread weekday,cosine directory,quote float,"
    "hash window,http sort,dtype calendar,zip random,calendar pointer,terminal matrix,newline gradient,color loss"
)


def demo_questions() -> list[Section]:
    """All pairs of pairs of each kind, both ways round."""
    named = {"opposites": _OPPOSITES, "gram1-plural": _PLURALS, "gram2-third-person": _VERBS}
    return [
        Section(
            name=name,
            questions=tuple((*one, *other) for one, other in permutations(map(_two, text.split(",")), 2)),
        )
        for name, text in named.items()
    ]


def demo_pairs() -> list[Pair]:
    """Pairs of three degrees."""
    return [
        Pair(one=one, other=other, score=score)
        for score, text in ((2.0, _SAME_KIND), (1.0, _SAME_SUBJECT), (0.0, _APART))
        for one, other in map(_two, text.split(","))
    ]


def _two(text: str) -> tuple[str, str]:
    one, other = text.split()
    return one, other
