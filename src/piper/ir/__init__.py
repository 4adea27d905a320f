"""The intermediate representation: chunk bodies and the training DAG. Free of torch."""
