BEGIN;  -- all of it or nothing: whoever is killed meanwhile leaves an empty file
CREATE TABLE history (
    repo TEXT PRIMARY KEY,      -- such as deepspeedai/DeepSpeed
    head TEXT NOT NULL,         -- the commit that was HEAD
    commits INTEGER NOT NULL,   -- that HEAD has
    rules TEXT NOT NULL         -- of the rules that decided (Rules.digest)
);
CREATE TABLE change (
    repo TEXT NOT NULL REFERENCES history, hash TEXT NOT NULL,
    written INTEGER NOT NULL, committed INTEGER NOT NULL,  -- seconds since 1970, by its author and by who took it in
    subject TEXT NOT NULL, body TEXT NOT NULL,
    fix INTEGER NOT NULL,       -- 1: taken for a bug's fix by its message
    rule TEXT NOT NULL,         -- that decided so (selection.toml)
    pull INTEGER,               -- the pull request that its subject names
    PRIMARY KEY (repo, hash)
);
CREATE TABLE file (
    repo TEXT NOT NULL, hash TEXT NOT NULL, path TEXT NOT NULL, was TEXT NOT NULL,  -- before a renaming, or ''
    kind TEXT NOT NULL,         -- test, ci, docs, example, build, source, config, other
    added INTEGER NOT NULL, deleted INTEGER NOT NULL,
    PRIMARY KEY (repo, hash, path), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE closed (           -- issues that a change closes: by its message, or by GitHub's own link
    repo TEXT NOT NULL, hash TEXT NOT NULL, issue INTEGER NOT NULL, by TEXT NOT NULL CHECK (by IN ('message', 'github')),
    PRIMARY KEY (repo, hash, issue, by), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE issue (            -- exported from GitHub (soli bugs export)
    repo TEXT NOT NULL, number INTEGER NOT NULL, title TEXT NOT NULL, body TEXT NOT NULL, labels TEXT NOT NULL,  -- a JSON list
    opened INTEGER NOT NULL, ended INTEGER,  -- seconds since 1970
    PRIMARY KEY (repo, number)
);
CREATE TABLE request (          -- merged pull requests, exported too
    repo TEXT NOT NULL, number INTEGER NOT NULL, hash TEXT, title TEXT NOT NULL, labels TEXT NOT NULL, opened INTEGER NOT NULL,
    merged INTEGER NOT NULL, reviewers INTEGER NOT NULL,
    PRIMARY KEY (repo, number)
);
CREATE VIEW size AS SELECT repo, hash,
    total(CASE WHEN kind IN ('source', 'build') THEN added + deleted END) AS source,
    total(CASE WHEN kind IN ('source', 'build') THEN max(added, deleted) END) AS larger,
    total(CASE WHEN kind IN ('source', 'build') THEN added END) AS added,
    total(added + deleted) AS "all",
    total(kind IN ('source', 'build')) AS files
FROM file GROUP BY repo, hash;
CREATE VIEW time_to_fix AS SELECT closed.repo, closed.hash, issue.number, (change.committed - issue.opened) / 86400.0 AS days,
    issue.labels, request.reviewers
FROM (SELECT DISTINCT repo, hash, issue FROM closed) AS closed JOIN issue ON issue.repo = closed.repo AND issue.number = closed.issue
    JOIN change USING (repo, hash) LEFT JOIN request ON request.repo = closed.repo AND request.number = change.pull;
CREATE TABLE verdict (          -- what a fix is of, by rules or a model (soli bugs classify)
    repo TEXT NOT NULL, hash TEXT NOT NULL,
    dimension TEXT NOT NULL, word TEXT NOT NULL,  -- of taxonomy.py; or fix: yes or no, which stands above the rules of selection
    confidence REAL,            -- the rules' probability of the word; a model gives none
    by TEXT NOT NULL CHECK (by IN ('rules', 'model')),
    version TEXT NOT NULL,      -- the rules' digest (Classifier.digest), or the model's name
    evidence TEXT NOT NULL,     -- a JSON list: the rules that spoke for the word with what they matched, or the model's reason
    PRIMARY KEY (repo, hash, dimension, by), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE TABLE edited (           -- what a change does to the syntax of its source and build files
    repo TEXT NOT NULL, hash TEXT NOT NULL, what TEXT NOT NULL,  -- such as "condition added" (syntax.py); '' where nothing was done
    count INTEGER NOT NULL, PRIMARY KEY (repo, hash, what), FOREIGN KEY (repo, hash) REFERENCES change
);
CREATE VIEW judged AS           -- commits that change code. told: whether each is a fix by its message; fix: by its syntax too, where that was read
SELECT change.repo, change.hash, written, committed, subject, body, coalesce(word = 'yes', fix) AS fix, fix AS told, rule, pull, source, larger, added, "all", files
FROM change JOIN size USING (repo, hash) LEFT JOIN verdict ON verdict.repo = change.repo AND verdict.hash = change.hash AND dimension = 'fix'
WHERE {CODE};
CREATE VIEW fix AS SELECT * FROM judged WHERE fix;
CREATE VIEW other AS SELECT * FROM judged WHERE NOT fix;  -- the control group
CREATE VIEW class AS            -- the word that counts: a model's where it was asked and the rules have less than {SURE}, else the rules'
SELECT repo, hash, dimension, word, confidence, by FROM verdict AS one WHERE by = 'rules' AND dimension != 'fix' AND
    (confidence >= {SURE} OR NOT EXISTS (SELECT 1 FROM verdict AS other WHERE (other.repo, other.hash, other.dimension, other.by) =
        (one.repo, one.hash, one.dimension, 'model')))
UNION ALL SELECT model.repo, model.hash, model.dimension, model.word, model.confidence, model.by FROM verdict AS model
    JOIN verdict AS rules USING (repo, hash, dimension) WHERE model.by = 'model' AND rules.by = 'rules' AND rules.confidence < {SURE};
PRAGMA user_version = {VERSION};
COMMIT;
