-- One database for each service that has one. Neither reads the other's.
CREATE DATABASE scheduler;
CREATE DATABASE artifacts;
