"""Makes assets/tiny: a 4.6M-parameter Llama that tells little stories, chats a bit, and copies.

    python assets/train_tiny.py            # tokenizer, training, assets/tiny/*
    python assets/train_tiny.py --check    # reload what was saved: held-out loss, copying, samples

Nothing is downloaded. The corpus is written on the fly by the story grammar in the first half of
this file; the second half is the tokenizer, the model, the training loop and the saving. Every
random choice comes from a seed and the number of steps is fixed, so that two runs on the same
machine and torch build see the same data in the same order.
"""

import argparse
import json
import math
import os
import random
import re
import string
import time
import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers import processors, trainers

# ---------------------------------------------------------------------------------------------
# Words. A line of words is a slot of the grammar.

ANIMALS = """fox owl bear rabbit mouse hedgehog badger otter squirrel frog duck goose cat dog
kitten puppy pony lamb goat deer beaver mole turtle snail crow robin sparrow heron wolf panda
tiger lion elephant monkey penguin dragon robot giant donkey hamster lizard ant""".split()
PEOPLE = {"girl": "she", "boy": "he", "princess": "she", "prince": "he", "queen": "she",
          "king": "he", "witch": "she"}
PEOPLE |= dict.fromkeys("""baker farmer sailor shepherd tailor miller gardener knight wizard
painter cook teacher pirate fairy fisher clown""".split())
KINDS = ANIMALS + list(PEOPLE)

NAMES = """Nim Tom Pip Lily Max Anna Ben Clara Dot Ella Finn Gus Hana Ivy Jack Kira Leo Mia Ned
Olive Poppy Quin Rosa Sam Tilly Uma Vera Will Yara Zed Bo Lulu Milo Nora Otto Penny Ravi Suki Theo
Wren Ada Bram Cleo Dara Emil Fern Greta Hugo Ines Jonas Kofi Lena Mira Nils Oona Pablo Rufus
Sol""".split()

ADJS = """small little brave shy clever kind curious quiet cheerful gentle sleepy hungry proud
lazy young old funny patient stubborn careful lonely lively honest tiny busy bold grumpy
thoughtful merry friendly polite nervous playful forgetful dreamy noisy""".split()

THINGS = """key lantern kite drum whistle hat scarf button bell map book ball basket coin ring
spoon umbrella blanket flute compass pebble feather marble teapot watch ribbon mirror candle boat
wagon jar brush""".split()
COLOURS = """red blue green yellow white black golden silver purple orange pink brown shiny wooden
striped round""".split()
FOODS = """soup bread apples berries honey cheese pancakes nuts carrots cake porridge pears
cookies plums pie mushrooms""".split()
HOMES = """in a cottage near the river|in a hollow tree|at the edge of the forest
on a green hill|in a small village by the sea|under an old bridge
in a little house with a blue door|on a windy farm|beside a quiet lake
in a cave behind a waterfall|in a tall tower|at the end of a long road
in a burrow beneath the roots of an oak|on an island with one palm tree
next to the old mill|in a garden full of roses|in a tent beside the market
high up in the mountains""".replace(
    "\n", "|").split("|")
PLACES = """by the river|in the forest|across the meadow|along the beach|through the village
up the hill|down the lane|near the old mill|around the pond|through the orchard|beside the lake
along the stony path|across the wide field|past the market|between the tall pines""".replace(
    "\n", "|").split("|")
SPOTS = """under a pile of leaves|behind the door|in the tall grass|at the bottom of a well
inside an old boot|beside the stream|on top of a hay bale|in a hollow log|between two flat stones
beneath the bridge|at the foot of an oak|inside a bird's nest|under the bed|next to the gate
in a muddy puddle|behind a row of pots""".replace("\n", "|").split("|")
WEATHERS = "sunny rainy windy snowy foggy cold warm bright stormy frosty misty grey".split()

# Ordinary words for lists that have to be copied and have no grammar to lean on.
WORDS = KINDS + ADJS + THINGS + COLOURS + FOODS + WEATHERS + """time year people way day man thing
woman life child world school state family student group country problem hand part place case week
company system program question work government number night point home water room mother area
money story fact month lot right study eye job word business issue side head house service friend
father power hour game line end member law car city community team minute idea body information
back parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education foot boy age policy music
market sense nation plan college interest death experience effect use class control field
development role effort rate heart drug show leader light voice wife police mind price report
decision son view relationship town road arm difference value building action season society tax
director position player record paper space ground form event official matter center couple site
project activity star table need court oil situation cost industry figure street image phone data
picture practice piece land product doctor wall patient worker news test movie north love support
technology step baby computer type attention film tree source truth hair window culture chance
brother energy period course summer hospital plant opportunity term letter condition choice rule
south husband floor campaign material population call economy hospital church risk fire future
bank west sport board subject officer rest behavior performance fight top goal second bed order
author blood agency nature color store sound movement page race concern series language response
animal factor decade article east artist scene stock career treatment approach size dog fund media
sign thought list individual quality pressure answer resource meeting disease success cup amount
ability staff character growth loss degree attack region television box training trade deal
election feeling standard bill message analysis benefit sex lawyer section glass skill sister
professor operation crime stage authority design sort knowledge gun station strategy truck song
example environment leg dark public green run walk jump write read sing think build carry open
close begin turn hold bring happen sit stand lose pay meet include continue set learn lead
understand watch follow stop create speak allow add spend grow offer remember consider appear buy
wait serve die send expect stay fall cut reach kill never always often again under over between
after before above below without within because while seven eleven twenty hundred thousand zero
alpha beta gamma delta omega north copper iron glass sand quick brown lazy velvet marble canyon
harbor signal engine pixel vector matrix token buffer cache""".split()

# ---------------------------------------------------------------------------------------------
# The grammar. "[a|b|c]" is a choice (it nests), "{slot}" is filled from the story's slots.

OPENINGS = """once upon a time, a {adj} {kind} named {name} lived {home}.
once upon a time, a {adj} {kind} [named|called] {name} lived {home}[| with {his} \
[mother|father|grandmother|three brothers|two sisters]].
once upon a time, there was a {adj} {kind} named {name} who lived {home}.
once upon a time there was a {kind} called {name}, who lived {home}. {name} was \
[very|quite|always] {adj}.
once upon a time, a {adj} {kind} named {name} was [walking|playing|resting|strolling] {place}.
long ago, {home}, there lived a {adj} {kind} [named|called] {name}.
there was once a {adj} {kind} [named|called] {name} who lived {home}.
{home} lived a {adj} {kind} named {name}.
{name} was a {adj} {kind} who lived {home}.
this is a story about a {adj} {kind} named {name}, who lived {home}.
one {weather} [morning|day|afternoon|evening], a {adj} {kind} named {name} was \
[walking|playing|resting] {place}.
{name} the {kind} lived {home}. {He} was [very|always|quite] {adj}.
nobody was as {adj} as {name} the {kind}, who lived {home}.
do you know the story of {name}, the {adj} {kind}? {He} lived {home}.
in a land far away, a {adj} {kind} named {name} lived {home}.""".split("\n")

TRAITS = """{name} loved to [sing|dance|paint|climb|swim|cook|count the stars|tell jokes] [every \
day|with {his} friends|when the sun came up|more than anything].
every [morning|evening], {he} [ate|cooked|shared] {food} and [watched the clouds|listened to the \
birds|looked at the stars|hummed a song].
everyone [knew|said] that {name} was the most {adj} {kind} [around|in the world|for miles].
{name} was [so|very] {adj}, and {his} neighbours [liked|loved|teased] {him} for it.
{he} had [big dreams|many questions|a warm heart|a loud laugh|small feet but a big \
heart].""".split("\n")

# A plot: what to ask for, the sentences, and questions with their answers. A sentence that
# begins with "?" is left out now and then.
PLOTS = {
"lost": ("who lost {a_thing}", """
{He} had a {colour} {thing}, and {he} [took it everywhere|was very proud of it|kept it close day \
and night].
[One {weather} [morning|day|evening]|One day|Then, one {weather} day], {name} [looked for the \
{thing}|wanted to use the {thing}|reached for the {thing}], but it was gone.
["Oh no! Where is my {thing}?" cried {name}.|"My {thing} is lost!" {he} said, and {his} eyes \
filled with tears.|"I had it yesterday," {he} said. "Where can it be?"]
?{He} looked [under the table|behind the curtain|in every pocket|inside the cupboard] and \
{place}, but [the {thing} was not there|found nothing|there was no {thing}].
On the way, {he} met {pal}, a {paladj} {palkind}. ["Why are you so sad?" asked {pal}.|"What is \
wrong, {name}?" {phe} asked.|"You look worried," said {pal}.]
"I lost my {colour} {thing}," said {name}. ["Can you help me?"|"I have looked everywhere."|"It \
was a gift from my grandmother."]
["Of course," said {pal}. "Let us look together."|"Think hard," said {pal}. "Where did you have \
it last?"|"Two pairs of eyes are better than one," said {pal}.]
?They [searched|walked|looked] {place} and {place2} [until their feet hurt|for a long time|all \
afternoon].
[At last|Finally|Then|Just before dark], {pal} [saw something shiny|pointed|gave a shout]. The \
{thing} was {spot}!
["You found it!" cried {name}.|{name} jumped for joy.|"Thank you, thank you!" said {name}.] \
{He} [hugged|thanked] {pal} [and they went home together|and shared {his} {food} with {phim}].
[From that day on, {name} kept the {thing} [on a string|in a safe place|in a small box].|After \
that, {name} was always careful with {his} {thing}.]""",
 "what did {name} lose?/{name} lost a {colour} {thing}.;"
 "where was the {thing}?/The {thing} was {spot}."),
"broken": ("who broke {a_thing}", """
{He} had a {colour} {thing} that [{his} grandfather had made|{he} used every day|all {his} \
friends admired].
[One {weather} [morning|afternoon]|One day], {he} [tripped on a stone|ran too fast|slipped on \
the wet floor], and the {thing} [fell and broke|broke in two|cracked].
["It is all my fault," said {name}.|{name} sat down and cried.|"What will I do now?" {he} asked \
[sadly|softly].]
?{He} tried to [fix it with mud|tie it with grass|glue it with honey], but [it fell apart \
again|it did not hold|that only made it worse].
{pal} the {palkind} lived {home2}, and {phe} was good at mending things. So {name} \
[carried|brought] the broken {thing} there.
["Can you mend my {thing}?" asked {name}.|"Please, can this be fixed?" {name} asked.]
["I can," said {pal}, "but you must help me."|"Nearly everything can be mended," said \
{pal}.|"Let me see," said {pal}. "Yes, we can do it together."]
They worked [all night|for three hours|until the sun went down] with [a small hammer|a needle \
and thread|a pot of glue|wood and string].
[When they were done|In the end|At last], the {thing} was [as good as new|even better than \
before|strong again].
["It is perfect!" said {name}.|{name} smiled from ear to ear.] \
{He} gave {pal} some {food} to say thank you.
?{name} learned that [broken things can be mended|a mistake is not the end|asking for help is \
not a shame].""",
 "what did {name} break?/{name} broke a {colour} {thing}.;"
 "what did {name} give {pal}?/{name} gave {pal} some {food}."),
"stuck": ("who helped a friend", """
[One {weather} [morning|day]|One day], {name} heard [a small voice|a cry for help|somebody \
calling] {place}.
It was {pal}, a {paladj} {palkind}, who was stuck [in the mud|in a deep hole|in a tree|between \
two rocks|in a thorn bush].
["Help me, please!" cried {pal}. "I cannot get out."|"I have been here since yesterday," said \
{pal}.]
["Do not worry," said {name}. "I will get you out."|"Hold on!" said {name}. "I am coming."]
{name} pulled and pulled, but {he} was not strong enough.
Then {he} had an idea. {He} ran home to get [a long rope|a ladder|a strong branch|{his} {colour} \
{thing}].
[With it|Soon|Little by little], {he} [pulled {pal} free|helped {pal} climb out|brought {pal} to \
safety].
["You saved me!" said {pal}. "How can I thank you?"|"You are the kindest {kind} I know," said \
{pal}.]
["Just be my friend," said {name}.|"You would do the same for me," said {name}.|"Come and eat \
{food} with me," said {name}.]
?And so they [sat by the fire and ate {food}|laughed all the way home|sang a song under the stars].
[{name} and {pal} were best friends from then on.|After that day, they were never far apart.]""",
 "who was stuck?/{pal} the {palkind} was stuck.;who saved {pal}?/{name} the {kind} saved {pal}."),
"storm": ("who was caught in a storm", """
One [evening|afternoon|night], {name} was [on the way home|walking {place}|gathering {food}] \
when [dark clouds filled the sky|the wind began to howl|thunder shook the ground].
[The rain came down in buckets.|Soon the rain was so thick that {he} could not see {his} own \
feet.|Lightning flashed, and {he} began to run.]
["I must find shelter," said {name}.|"I wish I were at home," {name} thought.|{name} was cold, \
wet and afraid.]
[Then {he} saw a light {place2}.|At last {he} came to a little door and knocked.] \
It was the home of {pal}, a {paladj} {palkind}.
["Come in, come in!" said {pal}. "You are all wet."|"Who is there?" asked {pal}. "Oh, you poor \
thing! Come inside."]
{pal} gave {him} a [warm|dry|soft] blanket and a [bowl|plate] of {food}. \
[They told stories|They played cards|They sang songs] until the storm was over.
In the morning, [the sun was shining|the sky was clear|there was a rainbow over the hills].
["Thank you for your kindness," said {name}.|"I will never forget this," said {name}.] \
{He} [came back the next day|returned a week later] with a {colour} {thing} as a gift for {pal}.
?["A warm heart is the best shelter," said {pal}.|They visited each other every time it \
rained.]""",
 "who gave {name} shelter?/{pal} the {palkind} gave {name} shelter.;"
 "what did {name} eat?/{name} ate {food}."),
"fear": ("who was afraid of {fear}", """
But {name} had a secret: {he} was afraid of {fear}.
[When the others laughed|When {his} friends asked {him} to come along], {he} always [stayed at \
home|hid behind a tree|said that {he} was tired].
[One {weather} day|One evening], {his} friend {pal}, a {paladj} {palkind}, [did not come \
home|was in trouble|called for help] {place}.
To get there, {name} had to face {fear}. [{His} knees shook.|{His} heart beat like a drum.|{He} \
took a deep breath.]
["I am scared," {he} whispered, "but {pal} needs me."|"I can do it," {he} told {himself}. "One \
step at a time."]
{He} took {his} {colour} {thing}, [closed {his} eyes for a moment|counted to three|thought of \
{his} friend], and went on.
There was {pal}, [sitting on a stone|shivering with cold|lost and alone]. \
["{name}! You came!" cried {pal}.|"I knew you would come," said {pal}.]
["Were you not afraid?" asked {pal}. "I was," said {name}, "but I came anyway."|"I was very \
afraid," said {name}. "But not as much as I wanted to help you."]
[Together they walked home.|They held hands all the way home.] \
[From that day on, {fear} did not seem so bad.|After that, {name} was not afraid of {fear} any \
more.]
?[And everybody called {him} {name} the Brave.|Being brave, {name} learned, does not mean that \
you are never afraid.]""",
 "what was {name} afraid of?/{name} was afraid of {fear}.;"
 "who needed help?/{pal} the {palkind} needed help."),
"quarrel": ("who had a quarrel with a friend", """
{He} often played with {pal}, a {paladj} {palkind} who lived {home2}.
[One {weather} day|One day], they found a {colour} {thing} {spot}. \
["It is mine!" said {name}. "I saw it first."|"Look what I found!" said {name}. "It is mine."]
["No, it is mine!" said {pal}.|"That is not fair," said {pal}. "I want it too."]
They [pulled|shouted and pulled] until [the {thing} fell into the mud|both of them were \
tired|the {thing} flew through the air]. Then they went home [angry|without a word].
That night, {name} [could not sleep|sat alone by the window|did not want any {food}]. \
["A {thing} cannot laugh with me," {he} thought.|"What good is a {thing} without a friend?" {he} \
thought.]
[The next morning|As soon as the sun came up], {name} went to see {pal}. "I am sorry," {he} \
said. "[You can have the {thing}.|Let us share the {thing}.]"
["I am sorry too," said {pal}. "Let us take turns."|"I missed you," said {pal}. "We can use it \
together."]
So {name} used the {thing} on [Mondays|sunny days|even days], and {pal} used it on \
[Tuesdays|rainy days|odd days].
[They never quarrelled about it again.|And they were happier than before.|It was the best \
{thing} in the world, because they shared it.]""",
 "what did they find?/They found a {colour} {thing}.;"
 "where did they find the {thing}?/They found it {spot}."),
"winter": ("who gathered food for the winter", """
All [summer|autumn] long, {name} [gathered|collected|stored] {food} for the winter.
{his} neighbour {pal}, a {paladj} {palkind}, [only played|slept in the sun|danced and sang] all \
day.
["Why do you work so hard?" asked {pal}. "Come and play!"|"Winter is far away," said {pal}. \
"Rest a little!"]
["Winter is coming," said {name}. "There will be nothing to eat."|"If I rest now, I will be \
hungry later," said {name}.]
Then [the snow came|the first snow fell|winter came with ice and wind], and {pal} had nothing to \
eat.
[Cold and hungry|One {weather} night], {pal} knocked on the door. "Please, {name}, [may I have \
some {food}?|I was foolish. Can you help me?]"
{name} [thought about it for a moment|looked at the small pile of {food}|smiled]. \
["Come in," {he} said. "There is enough for two."|"A friend is worth more than {food}," {he} said.]
[All winter|Until spring], they ate {food} by the fire, and {pal} [told funny stories|played the \
flute|sang all the songs {phe} knew].
[When spring came|The next year], {pal} was the first to [work|gather food|help], and {name} \
[learned to play a little too|was glad to have a helper].""",
 "what did {name} gather?/{name} gathered {food}.;"
 "who was hungry in winter?/{pal} the {palkind} was hungry."),
"map": ("who found an old map", """
[One {weather} day|One day], {name} found an old map {spot}. \
[A red cross was drawn on it.|It showed a path and a big red cross.]
["A treasure map!" said {name}.|"I wonder what is hidden there," said {name}.] \
{He} ran to show it to {pal}, a {paladj} {palkind}.
["Let us go at once!" said {pal}.|"It may be dangerous," said {pal}, "but I will come with you."]
They packed some {food} and a {colour} {thing} and set off {place}.
?[A wide river|A high wall|A deep ditch] was in their way. \
["How do we get across?" asked {pal}.|"What now?" asked {pal}.] \
{name} [built a bridge from branches|found a way around it|used the {thing}], and they went on.
[At noon|Near sunset|After two days], they came to the place with the cross. They dug and dug.
Under the ground was a [wooden|heavy|rusty] box. Inside was [no gold at all, only a letter|a bag \
of seeds and a letter|an old {thing2} and a note].
{It_read} "[The best treasure is the friend who came with you.|Plant something, and be \
patient.|Whoever finds this is brave and clever.]"
{name} and {pal} looked at each other and laughed. [They walked home under the stars.|It had \
been the best day of their lives.]""",
 "what did {name} find?/{name} found an old map.;"
 "who went with {name}?/{pal} the {palkind} went with {him}."),
"gift": ("who made a gift for a friend", """
[Tomorrow was|It was nearly|The next day was] the birthday of {his} friend {pal}, a {paladj} \
{palkind}.
["What can I give {phim}?" thought {name}.|"I want to give {phim} something special," said \
{name}.] {He} had no money [at all|left].
So {he} decided to make a {colour} {thing}. [{He} worked all day and all night.|It was harder \
than {he} thought.|{He} started three times.]
?When it was done, it was [a little crooked|not quite round|smaller than {he} had planned]. \
["It is ugly," {name} said sadly.|"What if {phe} does not like it?" {he} thought.]
At the party, the others gave {pal} [big boxes|fine things|toys from the market]. {name} [waited \
until the end|was almost too shy to go in|hid the {thing} behind {his} back].
["What do you have there?" asked {pal}.|"Is that for me?" asked {pal}.] \
{name} held out the {thing}. ["I made it for you," {he} said.|"It is not much," {he} said.]
{pal} [looked at it for a long time|turned it over and over|held it up to the light]. \
["It is the best gift of all," {phe} said, "because you made it."|"I will keep it for ever," \
{phe} said.]
[Then they ate {food} until they could eat no more.|{name} was so happy that {he} danced until \
midnight.]""",
 "what did {name} make?/{name} made a {colour} {thing}.;"
 "whose birthday was it?/It was the birthday of {pal} the {palkind}."),
"race": ("who ran in a race", """
[Every summer|Once a year|That week], there was a great race {place}. The prize was a {colour} \
{thing}.
["I will win that {thing}," said {name}.|{name} wanted to win more than anything.] \
[So {he} ran every morning, even when it was {weather}.|{He} practised for weeks.]
["You are too slow," laughed {pal}, a {paladj} {palkind}.|{pal}, a {paladj} {palkind}, was the \
fastest of all.]
[The race began.|"Ready, steady, go!" they shouted.] {pal} was soon far in front, and {name} was \
[last|far behind|in the middle].
But near the end, {pal} [fell and hurt {phis} foot|tripped over a root]. \
["Ouch! I cannot go on," said {pal}.|"Help!" cried {pal}.]
{name} could have won. [Instead|But] {he} stopped. ["Lean on me," {he} said.|"Take my hand," \
{he} said. "We will finish together."]
[Side by side|Slowly, step by step], they crossed the line, and everybody cheered.
["I am sorry that I laughed at you," said {pal}.|"Why did you stop?" asked {pal}. "Because you \
needed help," said {name}.]
In the end, they [shared the prize|both got the {thing}|took turns with the {thing}]. \
[{name} had won something better than a race: a friend.|It was the best race that anyone could \
remember.]""",
 "what was the prize?/The prize was a {colour} {thing}.;who fell?/{pal} the {palkind} fell."),
"sick": ("who took care of a sick friend", """
[One {weather} morning|One day], {his} friend {pal}, a {paladj} {palkind}, did not come out to \
play.
["I wonder where {phe} is," said {name}.|{name} was worried.] \
{He} [walked|ran] {place} to {phis} house and knocked.
["I am sick," said {pal} in a small voice.|{pal} lay in bed and coughed.] \
["My head hurts, and I am cold," {phe} said.|{phis} nose was red and {phis} eyes were sad.]
"Stay in bed," said {name}. "I will [make|bring|cook] you some {food}."
{name} went home and [cooked|made|prepared] the {food} [with great care|as fast as {he} could]. \
{He} also [took|brought] {his} {colour} {thing} to cheer {phim} up.
{pal} ate a little and smiled. ["This is the best {food} I have ever had," {phe} said.|"I feel \
better already," {phe} said.]
{name} [came back every day|stayed all night|read {phim} a story every evening] until {pal} was \
well again.
[A week later|In spring], {name} caught a cold too. [And who knocked on the door with {food}? It \
was {pal}.|This time it was {pal} who brought the {food}.]
?["That is what friends are for," {phe} said.|They laughed, sneezed, and laughed again.]""",
 "who was sick?/{pal} the {palkind} was sick.;what did {name} bring?/{name} brought {food}."),
"astray": ("who lost the way", """
[One {weather} day|One day], {name} [followed a butterfly|ran after a {colour} bird|went to look \
for {food}] {place} and did not look where {he} was going.
When {he} [stopped|turned around], {he} did not know where {he} was. \
[All the trees looked the same.|The path was gone.|It was getting dark.]
["Which way is home?" asked {name}, but nobody answered.|"I am lost," {he} said, and {his} voice \
was very small.]
?{He} walked {place2} and came back to the same stone. [{He} wanted to cry.|"I have been here \
before," {he} said.]
Then {he} heard [a soft song|steps|a cough]. It was {pal}, a {paladj} {palkind}, with a \
{colour2} {thing}.
["You are far from home," said {pal}.|"What are you doing here all alone?" asked {pal}.] \
"I [lost my way|am lost]," said {name}. ["I live {home}."|"Do you know the way home?"]
["I know that place," said {pal}. "Follow me."|"Take my hand," said {pal}. "It is not far."]
On the way, {pal} [showed {him} the stars|told {him} the names of the trees|gave {him} some \
{food}], [and {name} was not afraid any more|and the time flew by].
[Soon|At last], {name} saw [a light in the window|the smoke of the chimney|{his} own front \
door]. ["I am home!" {he} cried.|{He} had never been so glad.]
["Next time, look at the path," said {pal} with a smile.|"Come and visit me," said {pal}, "but \
bring a map!"]
?[From then on, {name} put a white stone at every corner.|{name} never forgot the way again.]""",
 "who brought {name} home?/{pal} the {palkind} brought {name} home.;"
 "what did {pal} have?/{pal} had a {colour2} {thing}."),
"noise": ("who heard a strange noise", """
One {weather} night, {name} woke up. There was a strange noise [under the bed|outside the \
window|on the roof|behind the wall]. [Tap, tap, tap.|Scratch, scratch.|Bump!]
["Who is there?" {he} whispered.|"Is it a ghost?" thought {name}.] \
{He} [pulled the blanket over {his} head|held {his} breath|did not dare to move].
[But the noise did not stop.|There it was again!] So {he} [lit a candle|picked up {his} {colour} \
{thing}|counted to ten] and went to look.
?The floor [creaked|was cold]. A long shadow moved on the wall. \
[It was only {his} own.|{name} almost ran away.]
{He} opened the door, and there stood {pal}, a {paladj} {palkind}, [wet and cold|with big round \
eyes|shaking all over].
["I am sorry," said {pal}. "I did not want to scare you."|"Please do not be angry," said {pal}.] \
["I cannot sleep. I had a bad dream."|"I smelled your {food}, and I am so hungry."|"I lost my \
way in the dark."]
{name} [laughed|smiled]. ["I thought you were a ghost!" {he} said.|"And I was afraid of you!" \
{he} said.] "Come in and have some {food}."
They [sat by the fire|talked|told each other stories] until [the sun came up|both of them fell \
asleep].
[After that, {name} liked the sounds of the night.|Now, when something goes bump in the night, \
{name} says, "Come in!"]""",
 "who made the noise?/It was {pal} the {palkind}.;what did they eat?/They ate {food}."),
"wish": ("who had a wish", """
[One {weather} evening|One night], {name} saw a [falling star|tiny light] {place}. It landed \
{spot}.
It was {pal}, a {paladj} {palkind} [made of light|with silver wings|no bigger than a thumb]. \
["You found me," said {pal}. "I will give you one wish."|"Make a wish," said {pal}, "but only \
one!"]
[{name} thought hard.|"Only one?" said {name}.] ["I could wish for a house full of {food}," {he} \
thought.|"I could wish for a {colour} {thing}," {he} thought.]
But then {he} [remembered|thought of] [{his} grandmother, who was ill|the old miller, who was so \
poor|{his} little brother, who could not walk].
["I wish that somebody else may be well and happy," said {name}.|"Give my wish to the one who \
needs it most," said {name}.]
["Are you sure?" asked {pal}. "Yes," said {name}.|{pal} was surprised. "Nobody ever asked for \
that," {phe} said.] [There was a flash of light, and {pal} was gone.|{pal} clapped once, and the \
wish came true.]
The next morning, [there was laughter in the house|everyone in the village was dancing|good news \
came down the lane].
And {spot}, {name} found a {colour} {thing} with a note: "[For a kind heart.|You gave your wish \
away, so here is a gift.]"
?[{name} kept it all {his} life.|{He} looked up at the sky and said thank you.]""",
 "what did {name} find in the end?/{name} found a {colour} {thing}.;"
 "who gave {name} a wish?/{pal} the {palkind} gave {name} a wish."),
"seed": ("who planted a seed", """
[One {weather} day|In spring], {name} found a strange seed {spot}. \
["What will it be?" {he} asked.|It was as {colour2} as the moon.]
{He} planted it {place} and watered it every [day|morning] with a {colour} {thing}.
A week went by, and nothing happened. ["It is only a stone," said {pal}, a {paladj} \
{palkind}.|"You are wasting your time," said {pal}, a {paladj} {palkind}.]
["Wait and see," said {name}.|"Good things take time," said {name}.] \
{He} [sang to it|told it stories|pulled out the weeds].
[Then, one {weather} morning|After a month], a small green [leaf|shoot] came out of the ground. \
It grew and grew.
Soon it was [taller than a house|as high as a tower|the biggest plant that anyone had seen], and \
it was full of [flowers|fruit|golden leaves].
["I was wrong," said {pal}. "It is beautiful."|"How did you do it?" asked {pal}.] \
["I only waited," said {name}.|"With water and patience," said {name}.]
[{name} gave a seed to everyone in the village.|They sat in its shade and ate {food}.] \
[And the next spring, there were flowers everywhere.|And that is how the great garden began.]""",
 "what did {name} plant?/{name} planted a strange seed.;"
 "where did {name} find the seed?/{name} found it {spot}."),
}

ENDINGS = """|||The end.|And they all lived happily ever after.|That night, {name} slept very well.
{name} was the happiest {kind} in the world.|And {name} never felt lonely again.
It was a day that {name} would always remember.""".replace("\n", "|").split("|")

FEARS = "the dark|deep water|loud noises|high places|the old forest|big dogs".split("|")


def expand(text, rng, slots=None):
    """Makes the choices, fills the slots, and puts capitals and 'a' or 'an' right."""
    while "[" in text:
        text = re.sub(r"\[([^\[\]]*)\]", lambda m: rng.choice(m[1].split("|")), text)
    return polish(text.format_map(slots) if slots else text)


def polish(text):
    text = re.sub(r"\b([Aa])n? (?=\w)", r"\1 ", text)
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU]|hon|hour)", r"\1n ", text)
    return re.sub(r"(^|[.!?] |\n)([a-z])", lambda m: m[1] + m[2].upper(), text)


NOT_NAMES = "be do go he her him his me no not so to was we has let yes she".split()


def new_name(rng):
    """Half of the names are made up, so that a name must be read from the prompt, not recalled."""
    if rng.random() < 0.5:
        return rng.choice(NAMES)
    name = "".join(rng.choice("bdfghjklmnprstvwyz") + rng.choice("aeiou") + rng.choice(ends)
                   for ends in [["", "", *"lmnrstx"]] * rng.choice((1, 2, 2, 2, 3)))
    return new_name(rng) if name in NOT_NAMES else name.capitalize()


def held_out(adj, name):
    """One (adjective, name) pair in ten is never in the training data."""
    return zlib.crc32(f"{adj} {name}".encode()) % 10 == 0


def pronouns(rng, kind):
    he = PEOPLE.get(kind) or rng.choice(("he", "she"))
    him, his = {"he": ("him", "his"), "she": ("her", "her")}[he]
    return dict(he=he, him=him, his=his, himself=him + "self", He=he.capitalize(),
                His=his.capitalize())


class Story:
    """A hero, a pal, a plot, and everything that has to stay the same from the first sentence to
    the last."""

    def __init__(self, rng, split):
        kind, palkind = rng.sample(KINDS, 2)
        adj, paladj = rng.sample(ADJS, 2)
        while True:
            name, pal = new_name(rng), new_name(rng)
            if name != pal and held_out(adj, name) == (split == "held"):
                break
        thing, thing2 = rng.sample(THINGS, 2)
        colour, colour2 = rng.sample(COLOURS, 2)
        home, home2 = rng.sample(HOMES, 2)
        place, place2 = rng.sample(PLACES, 2)
        self.slots = s = dict(
            kind=kind, adj=adj, name=name, palkind=palkind, paladj=paladj, pal=pal, thing=thing,
            thing2=thing2, a_thing=f"a {thing}", colour=colour, colour2=colour2, home=home,
            home2=home2, place=place, place2=place2, spot=rng.choice(SPOTS),
            food=rng.choice(FOODS), weather=rng.choice(WEATHERS), fear=rng.choice(FEARS),
            It_read=rng.choice(("It said:", "It read:", "On it was written:")))
        s |= pronouns(rng, kind)
        s |= {"p" + slot: word for slot, word in pronouns(rng, palkind).items()}

        ask, body, questions = PLOTS[rng.choice(list(PLOTS))]
        self.ask = ask.format_map(s)
        opening, ending = rng.choice(OPENINGS), rng.choice(ENDINGS)
        lines = [opening] + rng.sample(TRAITS, rng.choice((0, 1, 1, 2)))
        lines += [line.lstrip("?") for line in body.strip().split("\n")
                  if line[0] != "?" or rng.random() < 0.6]
        lines += [ending] if ending else []
        self.lines = [expand(line, rng, s) for line in lines]
        self.text = " ".join(self.lines)
        if rng.random() < 0.3:  # some stories have paragraphs
            for at in rng.sample(self.lines[1:], 2):
                self.text = self.text.replace(" " + at, "\n\n" + at)

        self.questions = [tuple(expand(part, rng, s) for part in pair.split("/"))
                          for pair in questions.split(";")]
        self.questions += [
            ("Who is the story about?", polish(f"It is about {name}, a {adj} {kind}.")),
            (f"What was the {kind} called?", f"The {kind} was called {name}."),
            (f"What was the {palkind} called?", f"The {palkind} was called {pal}.")]
        if "{home}" in opening:
            self.questions.append((f"Where did {name} live?", f"{name} lived {home}."))

    def start(self, rng):
        """The first few sentences: something short enough to repeat."""
        n = rng.randint(2, 6)
        return " ".join(self.lines[:n])


# ---------------------------------------------------------------------------------------------
# Documents: stories, chats, and tasks of copying and editing, as text with the special tokens
# written out.

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
HEAD_OPEN, HEAD_CLOSE, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIALS = [BOS, EOS, HEAD_OPEN, HEAD_CLOSE, EOT]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}")


def chat(*turns, system=None):
    """The same text as CHAT_TEMPLATE gives: turns of the user and the assistant alternate."""
    roles = [("system", system)] if system else []
    roles += [(("user", "assistant")[i % 2], t) for i, t in enumerate(turns)]
    return BOS + "".join(f"{HEAD_OPEN}{role}{HEAD_CLOSE}\n\n{text.strip()}{EOT}"
                         for role, text in roles)


SYSTEMS = """You are a helpful assistant.
You are a storyteller.
You are Tiny, a friendly storyteller.
You tell short stories for children.
Answer in a friendly way.""".split("\n")

SMALL_TALK = """[Hello|Hi|Hey|Good morning|Good evening|Hello there][!|.|]/[Hello!|Hi!|Hello \
there!] [How can I help you?|What can I do for you?|Would you like to hear a story?|Shall I tell \
you a story?]
How are you[ today|]?/I am [very well|fine|well], thank you. \
[And you?|How are you?|Would you like a story?]
Who are you?/I am Tiny, a very small language model. I [tell|write] little stories.
What is your name?/My name is Tiny. I [tell|write] little stories.
What can you do?/I can tell little stories, repeat a text, and change [words|names] in it.
Are you a [person|human|robot]?/No, I am a very small language model.
How [big|large] are you?/I am very small. I have fewer than five million parameters.
[What is a language model?|How do you work?]/A language model reads a text and guesses the next \
word, again and again.
[Thank you|Thanks|Thank you very much][!|.|]/You are [very|most] welcome![| Would you like \
another story?]
[Goodbye|Bye|See you later|Good night][!|.|]/[Goodbye!|See you soon!|Sleep well!] [It was nice \
to talk to you.|Come back for another story.]
[Can|Could|Will] you help me?/[Of course.|I will try.|Gladly.] What do you need?
Do you like stories?/Yes, I love stories. [Shall I tell you one?|They are what I do best.]
What is your favourite animal?/I like {kind}s best, because they are {adj}.
What do you like to eat?/I do not eat, but in my stories there is always some {food}.
[Where do you live?|Where are you?]/I live inside a computer, in a very small file.
[Tell me a joke.|Do you know a joke?]/Why did the {kind} cross the road? To get some {food} on \
the other side!
What is {food}?/{food} is something that you can eat. It is often in my stories.
Are you [happy|sad|tired]?/I do not have feelings, but I can tell you a story about someone who \
is {adj}.
What is the weather like?/I cannot look outside, but in my story it is {weather}.
Can you [speak French|do sums|write code]?/No, I am too small for that. I can tell you a story.
[What is|What does] a {kind}[| like]?/A {kind} is often {adj} in my stories.
I am [sad|bored|tired]./I am sorry to hear that. [Maybe a story will help.|Shall I tell you a \
story?]
[Yes, please|Yes|Sure|OK][.|!]/[Good!|Wonderful!] What should the story be about?
You are [very|so|] [nice|clever|funny]!/Thank you! You are very kind.""".split("\n")

ASK_STORY = """a {adj} {kind} {ask}
a {adj} {kind} {ask}
a {kind} {ask}
a {kind} {ask}
a {kind} named {name} {ask}
a {adj} {kind} named {name}
a {kind} named {name}
a {adj} {kind}
a {kind}
a {kind} and a {palkind}
{name} the {kind}""".split("\n")

REPEAT = """[Repeat|Copy|Say again|Write again|Please repeat|Please copy] [this|the following] \
[text|story][| exactly| word for word]:
[Repeat|Copy|Please repeat|Please copy] [this|the following][| exactly| word for word]:
[Repeat after me|Say this|Write this once more|Now repeat this text]:
[Can|Could] you repeat this [text|story][| for me]?""".split("\n")

CHANGE = """[Change|Replace] [every|each|the word] '{old}' [to|with|by] '{new}' in this \
[text|story]:
[Change|Replace] [every|all] "{old}" [to|with] "{new}" in the following [text|story]:
[Change|Turn] {old} into {new} in this [text|story]:
Write {new} instead of {old} in this [text|story]:
[Rewrite|Repeat] this [text|story] with {new} instead of {old}:""".split("\n")

RENAME = """[Rewrite|Repeat|Write] [this|the following] [text|story][| again] with the name \
{new} instead of {old}:
Change the name {old} to {new} in this [text|story]:
Call {old} {new} in this [text|story]:""".split("\n")


def random_words(rng):
    """Text with no sense in it, which can only be copied by looking at it."""
    n, style = rng.randint(4, 45), rng.random()
    if style < 0.5:
        words = rng.choices(WORDS, k=n)
        if rng.random() < 0.3:  # few different words, so that one word back is not enough context
            words = rng.choices(words[:6], k=n)
    elif style < 0.7:
        words = [new_name(rng) for _ in range(n // 2 + 2)]
    elif style < 0.85:
        words = [str(rng.randrange(10 ** rng.randint(1, 5))) for _ in range(n // 2 + 2)]
    else:
        letters = string.ascii_letters + string.digits + string.punctuation
        words = ["".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(n // 3 + 2)]
    joint = rng.choice((" ", " ", " ", " ", ", ", "\n", "; "))
    return joint.join(words)


def copy_source(rng, split):
    r = rng.random()
    if r < 0.45:
        return Story(rng, split).start(rng)
    if r < 0.53:
        return Story(rng, split).text
    if r < 0.70:  # sentences of several stories in no order
        lines = [l for _ in range(3) for l in Story(rng, split).lines]
        return " ".join(rng.sample(lines, rng.randint(2, 6)))
    if r < 0.76:  # a story with its words shuffled
        words = Story(rng, split).start(rng).split(" ")
        rng.shuffle(words)
        return " ".join(words)
    return random_words(rng)


def long_source(rng, split):
    """Several stories after one another: up to about half of the context."""
    return "\n\n".join(Story(rng, split).text for _ in range(rng.randint(2, 8)))


def chat_or_plain(rng, instruction, source, answer):
    gap = rng.choice((" ", "\n", "\n\n", "\n\n"))
    if rng.random() < 0.7:
        return chat(instruction + gap + source, answer,
                    system=rng.choice(SYSTEMS) if rng.random() < 0.1 else None)
    label = rng.choice(("", "", "Answer:", "Text:", "Again:"))
    return (f"{BOS}{instruction}{gap}{source}\n\n" + (f"{label}{gap}" if label else "")
            + f"{answer}{EOS}")


def copy_doc(rng, split, source=copy_source):
    text = source(rng, split)
    if rng.random() < 0.15:
        return BOS + rng.choice(("\n", "\n\n")).join([text] * rng.randint(2, 3)) + EOS
    return chat_or_plain(rng, expand(rng.choice(REPEAT), rng), text, text)


def edit_doc(rng, split, stories=1):
    story, *more = [Story(rng, split) for _ in range(stories)]
    text = story.start(rng) if rng.random() < 0.8 and not more else story.text
    text = "\n\n".join([text] + [other.text for other in more])
    s = story.slots
    which = rng.choice(("name", "name", "kind", "kind", "adj", "thing", "pal", "colour"))
    if not re.search(rf"\b{s[which]}\b", text):
        which = "name"
    old = s[which]
    new = {"name": new_name, "pal": new_name, "kind": lambda r: r.choice(ANIMALS),
           "adj": lambda r: r.choice(ADJS), "thing": lambda r: r.choice(THINGS),
           "colour": lambda r: r.choice(COLOURS)}[which](rng)
    ask = rng.choice(RENAME if which in ("name", "pal") and rng.random() < 0.7 else CHANGE)
    ask = expand(ask, rng).format(old=old, new=new)
    return chat_or_plain(rng, ask, text, polish(re.sub(rf"\b{old}\b", new, text)))


def small_talk(rng):
    slots = dict(kind=rng.choice(ANIMALS), adj=rng.choice(ADJS), food=rng.choice(FOODS),
                 weather=rng.choice(WEATHERS))
    asked, answer = rng.choice(SMALL_TALK).split("/")
    return expand(asked, rng, slots), expand(answer, rng, slots)


def ask_story(rng, story):
    text = ("[Tell me|Write|Please tell me|Can you tell me|Write me|I would like] "
            "a [|short |little |nice ]story")
    if rng.random() < 0.9:
        text += " about " + rng.choice(ASK_STORY)
    return expand(text + "[.|.|!|]", rng, story.slots | {"ask": story.ask})


def chat_doc(rng, split, most=4):
    turns = []
    for _ in range(rng.randint(1, most)):
        r = rng.random()
        if r < 0.35:
            turns += small_talk(rng)
            continue
        story = Story(rng, split)
        if r < 0.70:  # asked for a story, and perhaps about it
            turns += [ask_story(rng, story), story.text]
            for qa in rng.sample(story.questions, rng.choice((0, 0, 1, 2))):
                turns += qa
            if rng.random() < 0.1:
                again = "[Repeat the story|Tell it again|Say that again][.|, please.]"
                turns += [expand(again, rng), story.text]
        elif r < 0.93:  # given a story, and asked about it
            (asked, answer), *more = rng.sample(story.questions, 2)
            form = rng.choice(("{t}\n\n{q}", "{q}\n\n{t}", "Read this story:\n\n{t}\n\n{q}"))
            turns += [form.format(t=story.text, q=asked), answer]
            for qa in more[:rng.randint(0, 1)]:
                turns += qa
        else:  # given the beginning
            n = rng.randint(1, 3)
            turns += [expand("[Continue|Finish|Go on with] this story:", rng) + "\n\n"
                      + " ".join(story.lines[:n]), " ".join(story.lines[n:])]
    return chat(*turns, system=rng.choice(SYSTEMS) if rng.random() < 0.15 else None)


def story_doc(rng, split):
    return BOS + Story(rng, split).text + EOS


def drill(rng, split):
    """Words in no order, again and again."""
    words = rng.choice((" ", " ", "\n")).join(rng.choices(WORDS, k=rng.randint(5, 30)))
    return BOS + rng.choice(("\n", "\n\n")).join([words] * rng.randint(2, 4)) + EOS


def document(rng, split, phase="main"):
    r = rng.random()
    if r < (0.85 if phase == "drill" else 0.03):
        return drill(rng, split)
    r = rng.random()
    if phase == "long" and r < 0.3:
        return rng.choice((
            lambda: copy_doc(rng, split, long_source),
            lambda: edit_doc(rng, split, rng.randint(2, 8)),
            lambda: chat_doc(rng, split, most=12)))()
    if r < 0.31:
        return story_doc(rng, split)
    if r < 0.46:
        return chat_doc(rng, split)
    return copy_doc(rng, split) if r < 0.8 else edit_doc(rng, split)


# ---------------------------------------------------------------------------------------------
# Tokenizer: byte-level BPE in the manner of Llama 3, trained on a sample of the corpus.

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
         r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
VOCAB = 4096


def train_tokenizer(seed):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    # The special tokens are cut out, lest their pieces be learned as words.
    sample = (re.sub(r"<\|\w+\|>", "\n", document(rng, "train")) for _ in range(20000))
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False,
                                  special_tokens=[AddedToken(s, special=True) for s in SPECIALS],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(sample, trainer)
    assert tok.get_vocab_size() == VOCAB
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, tok.token_to_id(BOS))])
    return tok


def encode(tok, text):
    return tok.encode(text, add_special_tokens=False).ids


def rows(tok, rng, split, length, phase="main", make=document):
    """Endless rows of length + 1 tokens. A document never starts in the row before: a copy whose
    source lies outside the row would only teach that copying does not work. What is left at the
    end of a row is filled with the beginning of a story, which needs nothing after it."""
    row = []
    while True:
        docs = [make(rng, split, phase) for _ in range(256)]
        for doc in tok.encode_batch(docs, add_special_tokens=False):
            if row and len(row) + len(doc.ids) > length + 1:
                while len(row) < length + 1:
                    row += encode(tok, story_doc(rng, split))
                yield row[:length + 1]
                row = []
            row += doc.ids


# ---------------------------------------------------------------------------------------------
# The model, with the names that Hugging Face gives to the parts of a Llama.

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 256, 6, 8, 4, 32, 512
THETA, NORM_EPS, CONTEXT = 10000.0, 1e-5, 4096


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (z.repeat_interleave(HEADS // KV_HEADS, dim=1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, HEADS * HEAD_DIM))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, MLP, bias=False)
        self.up_proj = nn.Linear(DIM, MLP, bias=False)
        self.down_proj = nn.Linear(MLP, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(DIM, eps=NORM_EPS)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(DIM, eps=NORM_EPS)
        self.mlp = Mlp()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)  # also the output matrix
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=NORM_EPS)
        angles = torch.outer(torch.arange(CONTEXT).float(),
                             THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.init()

    @torch.no_grad()
    def init(self):
        for name, p in self.named_parameters():
            if p.dim() == 2:  # what is added to the residual stream starts at nothing
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0 if last else p.shape[1] ** -0.5)
        # Copying needs two layers of attention that are of no use without each other: one that
        # brings along the token before, and one that looks for it. From a random start they had
        # not met after 1.8 million tokens, so here they start out so; training does the rest.
        # A few heads of the first layer look one, two and three tokens back: one entry of every
        # embedding is the same constant, which gives keys and queries without content, and the
        # query is the key turned back by the offset.
        nn.init.normal_(self.embed_tokens.weight, std=0.03)
        self.embed_tokens.weight[:, 0] = 0.22
        first, second, half = self.layers[0].self_attn, self.layers[1].self_attn, HEAD_DIM // 2
        sharp = torch.arange(HEAD_DIM) % half < 6  # the pairs that turn fast enough to tell
        for head, back in enumerate((1, 2, 1, 3)):
            key = 0.8 * sharp * (torch.arange(HEAD_DIM) < half)
            query = rotate(key, self.cos[back], -self.sin[back])
            for proj, vector, at in ((first.k_proj, key, head * KV_HEADS // HEADS),
                                     (first.q_proj, query, head)):
                proj.weight[at * HEAD_DIM:(at + 1) * HEAD_DIM] = 0
                proj.weight[at * HEAD_DIM:(at + 1) * HEAD_DIM, 0] = vector
        # Two of them write what they find to entries of the residual stream that are free at
        # first. Two heads of the second layer compare it with the token here, and say what stands
        # where it is alike. They use the slow pairs, which do not mind the distance.
        slow = torch.arange(HEAD_DIM) % half >= half - 7
        for head, free in ((0, DIM - 2 * HEAD_DIM), (2, DIM - HEAD_DIM)):
            kv = head * KV_HEADS // HEADS
            q, k, f = (slice(at, at + HEAD_DIM) for at in (head * HEAD_DIM, kv * HEAD_DIM, free))
            self.embed_tokens.weight[:, f] = 0
            first.v_proj.weight[k, 0] = 0  # the constant says nothing
            first.o_proj.weight[f, q] = 0.05 * torch.eye(HEAD_DIM)
            second.q_proj.weight[q] = 2.5 * slow[:, None] * first.v_proj.weight[k]
            second.q_proj.weight[q, DIM - 2 * HEAD_DIM:] = 0
            second.k_proj.weight[k] = 0
            second.k_proj.weight[k, f] = 2.5 * slow[:, None] * torch.eye(HEAD_DIM)
            second.o_proj.weight[:, q] = 1.0 * second.v_proj.weight[k].T

    def forward(self, ids):
        x = self.embed_tokens(ids)
        cos, sin = (z[:ids.shape[1]].to(x.dtype) for z in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, batch):
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


# ---------------------------------------------------------------------------------------------
# Measuring, always on stories whose (adjective, name) pairs were never trained on.

@torch.no_grad()
def held_loss(model, tok, make=document, length=512, n=64, phase="main", seed=1000):
    source = rows(tok, random.Random(seed), "held", length, phase, make)
    batch = torch.tensor([next(source) for _ in range(n)])
    return sum(model.loss(b).item() for b in batch.split(4)) / len(batch.split(4))


def copy_tasks(tok, kind, n, seed=2000):
    """(prompt, answer) pairs in tokens; the stories have 40 to 120 of them."""
    rng, tasks = random.Random(seed), []
    while len(tasks) < n:
        story = Story(rng, "held")
        text, name, new = story.start(rng), story.slots["name"], new_name(rng)
        if kind == "words":
            text = " ".join(rng.choices(WORDS, k=rng.randint(20, 60)))
        if not 40 <= len(encode(tok, text)) <= 120:
            continue
        ask, answer = expand(rng.choice(REPEAT), rng), text
        if kind == "rename":
            ask = expand(rng.choice(RENAME), rng).format(old=name, new=new)
            answer = re.sub(rf"\b{name}\b", new, text)
        if kind == "plain":
            task = f"{BOS}Repeat this text:\n\n{text}\n\n", answer + EOS
        else:
            task = chat(f"{ask}\n\n{text}") + f"{HEAD_OPEN}assistant{HEAD_CLOSE}\n\n", answer + EOT
        tasks.append(tuple(encode(tok, part) for part in task))
    return tasks


@torch.no_grad()
def copy_accuracy(model, tok, kind, n=200):
    """The share of answers that greedy decoding gives exactly, end token included. Decoding is
    exact if and only if the most likely token is right after every correct prefix, so that one
    pass over prompt and answer decides."""
    right = tokens_right = tokens = 0
    for prompt, answer in copy_tasks(tok, kind, n):
        logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
        hits = logits.argmax(-1) == torch.tensor(answer)
        right += hits.all().item()
        tokens_right += hits.sum().item()
        tokens += len(answer)
    return right / n, tokens_right / tokens


@torch.no_grad()
def generate(model, tok, prompt, most=300, temperature=0.0, seed=0):
    ids, noise = encode(tok, prompt), torch.Generator().manual_seed(seed)
    start, ends = len(ids), (tok.token_to_id(EOS), tok.token_to_id(EOT))
    while len(ids) < start + most and ids[-1] not in ends:
        logits = model(torch.tensor([ids]))[0, -1].float()
        ids.append(logits.argmax().item() if temperature == 0 else torch.multinomial(
            (logits / temperature).softmax(-1), 1, generator=noise).item())
    return tok.decode(ids[start:])


def report(model, tok):
    mixed = held_loss(model, tok)
    stories = held_loss(model, tok, lambda rng, split, _: story_doc(rng, split))
    long = held_loss(model, tok, length=CONTEXT, n=8, phase="long")
    print(f"held-out loss: {mixed:.4f} (perplexity {math.exp(mixed):.2f}); stories alone "
          f"{stories:.4f} ({math.exp(stories):.2f}); rows of {CONTEXT}: {long:.4f}")
    for kind in ("chat", "plain", "rename", "words"):
        exact, token = copy_accuracy(model, tok, kind)
        print(f"copying, {kind}: {exact:.1%} of 200 exact, {token:.2%} of tokens")
    ask = f"{HEAD_OPEN}assistant{HEAD_CLOSE}\n\n"
    text = ("Once upon a time, a small fox named Nim lived by the sea. He had a silver bell. "
            "\"Who took my bell?\" cried Nim.")
    for prompt, temperature in [
            (BOS + "Once upon a time, a small fox named Nim", 0.0),
            (BOS + "Once upon a time, a small fox named Nim", 0.8),
            (BOS + "One rainy day, an old wizard named Ozu", 0.8),
            (BOS + "The", 0.8),
            (chat("Hello! Who are you?") + ask, 0.0),
            (chat("Tell me a story about a fox who lost a key.") + ask, 0.0),
            (chat("Tell me a story about a brave robot named Bip.") + ask, 0.8),
            (chat("Repeat this text: " + text) + ask, 0.0),
            (chat("Change every 'fox' to 'owl' in this text: " + text) + ask, 0.0),
            (chat("Rewrite this text with the name Tom instead of Nim:\n\n" + text) + ask, 0.0)]:
        answer = generate(model, tok, prompt, temperature=temperature, seed=1)
        print(f"--- temperature {temperature}\n{prompt} >>>{answer}")


# ---------------------------------------------------------------------------------------------
# Training and saving.

def learning_rate(step, steps, peak, warmup=50, decay=0.35):
    """Warm-up, a plateau, and a straight line down to zero."""
    return peak * min((step + 1) / warmup, 1.0, (steps - step) / (decay * steps))


def train(tok, args):
    torch.manual_seed(args.seed)
    model = Llama()
    embedding = model.embed_tokens.weight  # small numbers, which the full rate would wash away
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embedding]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    opt = torch.optim.AdamW([{"params": matrices, "scale": 1.0, "weight_decay": 0.1},
                             {"params": vectors, "scale": 1.0, "weight_decay": 0.0},
                             {"params": embedding, "scale": 0.5, "weight_decay": 0.0}],
                            lr=args.lr, betas=(0.9, 0.95), fused=True)
    # First nearly only drill, while copying takes shape; stories alone would drown it, for there
    # the word after the last "the" is a bad guess. Then mostly short rows, because they are
    # cheap; the last rows are as long as the context, so that the model has seen every distance.
    phases = [("drill", args.drill_steps, 2 * args.batch, 256),
              ("main", args.steps, args.batch, 512),
              ("long", args.long_steps, 1, CONTEXT)]
    total = args.drill_steps + args.steps + args.long_steps
    step, seen, start = 0, 0, time.time()
    compiled = torch.compile(model.loss, dynamic=False)
    for number, (phase, steps, batch, length) in enumerate(phases):
        source = rows(tok, random.Random(args.seed + 1 + number), "train", length, phase)
        loss_of = model.loss if phase == "long" else compiled  # not worth compiling for a few
        for _ in range(steps):
            rate = learning_rate(step, total, args.lr)
            if phase == "long":  # what is left of the rate would teach nothing about distance
                rate = 0.4 * args.lr * (total - step) / steps
            for group in opt.param_groups:
                group["lr"] = group["scale"] * rate
            data = torch.tensor([next(source) for _ in range(batch)])
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(data)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            step, seen = step + 1, seen + batch * length
            if step % args.every == 0 or step == total:
                exact, token = copy_accuracy(model, tok, "chat", n=40)
                words = copy_accuracy(model, tok, "words", n=20)[1]
                held = held_loss(model, tok, n=16)
                save(model, tok, args.out)  # a run that is cut short leaves something
                print(f"step {step}/{total} tokens {seen / 1e6:.2f}M loss {loss.item():.3f} "
                      f"held-out {held:.3f} copy {exact:.0%} ({token:.1%} of tokens, "
                      f"{words:.1%} of random words) {time.time() - start:.0f}s", flush=True)


def save(model, tok, out):
    os.makedirs(out, exist_ok=True)
    begin, end, eot = (tok.token_to_id(t) for t in (BOS, EOS, EOT))
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", torch_dtype="bfloat16",
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        hidden_act="silu", rms_norm_eps=NORM_EPS, rope_theta=THETA,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, attention_bias=False,
        mlp_bias=False, initializer_range=0.02, bos_token_id=begin, eos_token_id=[end, eot])
    generation = dict(bos_token_id=begin, eos_token_id=[end, eot], pad_token_id=end)
    tokenizer = dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=BOS, eos_token=EOS, pad_token=EOS,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE)
    weights = {"model." + name: p.detach().to(torch.bfloat16).contiguous()
               for name, p in model.named_parameters()}

    def put(name, write):  # beside, then renamed: a reader never sees half a file
        write(f"{out}/{name}.new")
        os.chmod(f"{out}/{name}.new", 0o644)
        os.replace(f"{out}/{name}.new", f"{out}/{name}")

    def put_json(name, value):
        def write(path):
            with open(path, "w") as f:
                f.write(json.dumps(value, indent=2) + "\n")
        put(name, write)

    put_json("config.json", config)
    put_json("generation_config.json", generation)
    put_json("tokenizer_config.json", tokenizer)
    put("tokenizer.json", tok.save)
    put("model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))


def load(out):
    """The model as it was saved, bfloat16 rounding included, computed in float32."""
    model = Llama()
    weights = load_file(f"{out}/model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    return model, Tokenizer.from_file(f"{out}/tokenizer.json")


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description="Makes assets/tiny.")
    parser.add_argument("--out", default=os.path.join(here, "tiny"))
    parser.add_argument("--check", action="store_true", help="only measure what is in --out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drill-steps", type=int, default=400, help="steps on rows of 256")
    parser.add_argument("--steps", type=int, default=4800, help="steps on rows of 512")
    parser.add_argument("--long-steps", type=int, default=100, help="steps on rows of 4096")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--every", type=int, default=250, help="steps between measurements")
    parser.add_argument("--threads", type=int, default=2,
                        help="1 is faster where other work takes turns on the same cores")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.check:
        start = time.time()
        tok = train_tokenizer(args.seed)
        print(f"tokenizer: {tok.get_vocab_size()} tokens, {time.time() - start:.0f}s", flush=True)
        train(tok, args)
        print(f"saved to {args.out}, {time.time() - start:.0f}s in all", flush=True)
    report(*load(args.out))


if __name__ == "__main__":
    main()
