-- Workers that go for good once they are lost are found without looking at all others.

CREATE INDEX workers_lost_for_good ON workers (id) WHERE ephemeral = TRUE AND state = 'lost';
